"""Tests of partita.observe."""
