"""Tests of partita.sharding without process groups: grouping, layouts, views, casts, buckets."""
