"""Train your own chat model. A module imports only from the floors below its own."""
