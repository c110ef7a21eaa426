"""Tests of partita.planner."""
