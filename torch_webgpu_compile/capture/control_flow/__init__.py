"""Higher-order operators, and operators whose results have sizes that depend on data."""
