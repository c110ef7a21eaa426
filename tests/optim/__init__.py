"""Tests of partita.optim."""
