"""What happens in training, as events, and the clock and the rates that are computed from them."""
