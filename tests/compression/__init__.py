"""Tests of partita.compression."""
