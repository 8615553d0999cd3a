"""The execution plan: plain, versioned data that every executor replays; and its cache."""
