"""The real engine as a rank of a cluster that is not there: what it holds, and what it sends."""
