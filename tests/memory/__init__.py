"""Tests of partita.memory on the CPU."""
