"""What looks after calls while they run: warnings, limits of time, Ctrl-C, and breakpoints that wait for a debugger."""
