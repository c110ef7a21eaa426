"""Tests of partita.train."""
