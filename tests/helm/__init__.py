"""The chart, rendered, installed and taken away by the real Helm (a library), without a cluster."""
