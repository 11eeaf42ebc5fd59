"""What Rewarm makes faster where MLX is slow."""


def install() -> None:
    """In this process, where it is faster on the device at hand (docs/accel.md)."""
    from rewarm.accel import cpu, delta

    delta.install()
    cpu.install()
