"""The pools: which workers run, which are wanted, which are replaced; publishes membership to routers."""
