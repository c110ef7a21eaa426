"""Tests of partita.layout."""
