"""Pictures of a scene: one fixed view, without details that cost time and show nothing."""

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from lerobot_craft.bench.metaworld.gl import import_mujoco, no_drawing
from lerobot_craft.bench.metaworld.tasks import Scene

_LOOK_AT, _DISTANCE, _AZIMUTH, _ELEVATION = (-0.02, 0.72, 0.13), 1.0, 140.0, -40.0  # the arm hides little from here
_MARKER_RADIUS = 0.025
_ARM_MESHES = {"pedestal", "base", "l0", "l1", "l2", "l3", "l4", "l5", "l6", "head", "eGripperBase"}
# Plain colors instead of wood and metal, so that small dark objects are visible even at 64 pixels.
_PLAIN = {"table_wood": (0.62, 0.62, 0.6), "basic_floor": (0.5, 0.5, 0.5), "wall_metal": (0.55, 0.55, 0.55)}
_ARM_GROUP = 5  # the one of MuJoCo's six geom groups that Meta-World does not use

# An OpenGL context belongs to the thread that created it.
_here = threading.local()


def photograph(model: Any, data: Any, scene: Scene, side: int, *, arm: bool) -> npt.NDArray[np.uint8]:
    """The scene [side, side, 3]: with the scene's own markers, without Meta-World's goal sites.

    Args:
        model: MuJoCo's model.
        data: Its state.
        scene: Defines the markers.
        side: In pixels.
        arm: Draw the arm behind the hand, which has most of the faces and takes most of the time.
    """
    mujoco = import_mujoco()
    renderer = _renderer(model, side)
    camera, option = mujoco.MjvCamera(), mujoco.MjvOption()
    camera.lookat[:], camera.distance, camera.azimuth, camera.elevation = _LOOK_AT, _DISTANCE, _AZIMUTH, _ELEVATION
    option.sitegroup[:] = 0
    option.geomgroup[_ARM_GROUP] = int(arm)
    renderer.update_scene(data, camera, option)
    drawn = renderer.scene
    for flag in ("SHADOW", "REFLECTION", "HAZE"):
        drawn.flags[getattr(mujoco.mjtRndFlag, f"mjRND_{flag}")] = 0
    for marker in scene.markers:
        ball = drawn.geoms[drawn.ngeom]
        size, turn = np.full(3, _MARKER_RADIUS), np.eye(3).ravel()
        colour = np.array([*marker.rgb, 1.0], np.float32)
        mujoco.mjv_initGeom(ball, mujoco.mjtGeom.mjGEOM_SPHERE, size, np.array(marker.at), turn, colour)
        drawn.ngeom += 1
    picture: npt.NDArray[np.uint8] = renderer.render()
    return picture


def _renderer(model: Any, side: int) -> Any:
    """One renderer per model and size: creating one takes a hundred times as long as a picture."""
    renderers: dict[tuple[int, int], Any] = _here.__dict__.setdefault("renderers", {})
    key = (id(model), side)  # models are never freed
    if key not in renderers:
        _prepare(model)
        model.vis.quality.offsamples = 0
        model.vis.quality.shadowsize = 0
        model.vis.global_.offwidth = max(model.vis.global_.offwidth, side)
        model.vis.global_.offheight = max(model.vis.global_.offheight, side)
        try:
            renderers[key] = import_mujoco().Renderer(model, side, side)
        except Exception as error:  # drivers raise many types
            raise no_drawing(error) from error
    return renderers[key]


def _prepare(model: Any) -> None:
    """Paint the room in plain colors, and put the arm's meshes, 90 % of all faces, into their own group."""
    mesh = import_mujoco().mjtGeom.mjGEOM_MESH
    for shape in range(model.ngeom):
        if model.geom_type[shape] == mesh and model.mesh(model.geom_dataid[shape]).name in _ARM_MESHES:
            model.geom_group[shape] = _ARM_GROUP
        material = model.geom_matid[shape]
        if material >= 0 and model.mat(material).name in _PLAIN:
            model.geom_rgba[shape, :3] = _PLAIN[model.mat(material).name]
            model.geom_matid[shape] = -1
