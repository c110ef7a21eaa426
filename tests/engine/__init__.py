"""Tests of partita.engine."""
