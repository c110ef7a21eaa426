"""Tests of partita.sharding."""
