"""Tests of partita.optim without process groups."""
