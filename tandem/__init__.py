"""tandem: disaggregated serving for hybrid language models."""
