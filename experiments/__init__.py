"""The arms as package data: bases and levers that `harness ab` compares and `harness init` writes out."""
