"""Tests of several packages at once."""
