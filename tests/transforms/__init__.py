"""Tests of partita.transforms."""
