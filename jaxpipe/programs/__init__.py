"""Programs as data: jaxprs, derivatives in two pieces, and compiled instructions."""
