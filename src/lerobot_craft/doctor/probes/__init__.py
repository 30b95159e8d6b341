"""Scripts that `lerobot_craft.doctor.probe` runs in a child process; they import nothing from craft."""
