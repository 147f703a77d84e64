"""A cluster of several hosts on one machine: each host is a network namespace with its own address and /tmp/ray."""
