"""What a user would bring: a tiny model, a server script, a client and some traffic."""
