//! Errors of the crate. Messages are for the user and contain the offending value.

use std::fmt;

#[derive(Debug, PartialEq)]
pub enum Error {
    /// Invalid input, with a message.
    Invalid(String),
    /// The caller requested a stop.
    Interrupted,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Invalid(message) => f.write_str(message),
            Error::Interrupted => f.write_str("interrupted"),
        }
    }
}

/// Shorthand for an `Error::Invalid` with a formatted message.
macro_rules! invalid {
    ($($words:tt)*) => { $crate::error::Error::Invalid(format!($($words)*)) };
}
pub(crate) use invalid;
