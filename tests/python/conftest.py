"""Fixtures of all tests."""

from ascend_fake import fake

__all__ = ["fake"]
