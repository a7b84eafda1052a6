"""One package a paper: its theory, recipes, charts, kept results and lab command. Nothing outside imports this room."""
