"""One file per subcommand, each thin; nothing heavy is imported at the top of any of them."""
