"""What a fail-over and a quiet hour cost, measured on real parts."""
