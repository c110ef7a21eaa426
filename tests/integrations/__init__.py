"""Tests of partita.integrations."""
