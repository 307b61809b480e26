"""What a run needs and how long it takes, before it is started: memory, time, cost, layouts. No torch."""
