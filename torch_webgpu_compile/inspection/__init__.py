"""Compiler and GPU for a person: stages as text, reports, profiles, the doctor."""
