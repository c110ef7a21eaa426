"""Tests of partita.cli."""
