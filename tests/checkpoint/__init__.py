"""Tests of partita.checkpoint."""
