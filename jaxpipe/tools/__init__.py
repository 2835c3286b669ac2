"""What is said of a job without training: `plan` forecasts it, `prove` checks it."""
