"""The protocols as package data: YAML files that say how to measure, gate, decide and classify."""
