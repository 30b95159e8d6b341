"""Probe: does MuJoCo render off-screen with the back-end that MUJOCO_GL names?"""

import json
import sys

_SCENE = """
<mujoco>
  <worldbody>
    <light pos="0 0 3"/>
    <geom type="sphere" size="1" rgba="1 0 0 1"/>
  </worldbody>
</mujoco>
"""
_SIDE = 64  # pixels


def main() -> None:
    """Render one sphere; a back-end that paints every pixel alike does not work either."""
    import mujoco

    model = mujoco.MjModel.from_xml_string(_SCENE)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    with mujoco.Renderer(model, _SIDE, _SIDE) as renderer:
        renderer.update_scene(data)
        pixels = renderer.render()  # (H, W, 3)
    finding = {"contrast": int(pixels.max()) - int(pixels.min())}
    sys.stdout.write(f"craft-probe {json.dumps({'render': finding})}\n")


if __name__ == "__main__":
    main()
