"""One layer's matrices over several ranks: each has a slice of them and computes a part."""
