"""A machine's place in a cluster of several: the Ray node, what it serves, its probes, and leaving in order."""
