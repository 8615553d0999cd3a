"""What a person sees of compiler and GPU: stages as text, reports, profiles, the doctor."""
