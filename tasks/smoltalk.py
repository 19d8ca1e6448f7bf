"""
SmolTalk: general conversations with the columns `messages` and `source`.

Source: Ben Allal et al., "SmolLM2", arXiv:2502.02737.
"""

from tasks.hub_chats import HubChats


class SmolTalk(HubChats):
    """`source`: any repository with a `messages` column and files named train and test."""

    name = "SmolTalk"
    splits = ("train", "test")
    repo = "HuggingFaceTB/smol-smoltalk"
    mapping = {"messages": "messages"}
    stems = {"test": "test"}
