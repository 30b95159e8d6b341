"""Our own experts, for tasks where Meta-World's fail too often or barely succeed."""

import numpy as np
import numpy.typing as npt

_GAIN = 25.0  # action per meter, as in Meta-World's experts
_GAIN_IN_THE_AIR = 10.0  # without contact, a gentler approach works
_OPEN, _CLOSE = -1.0, 1.0
_HAND_ABOVE_FINGERS = np.array([0.0, 0.0, 0.045])  # meters


class LiftFromAbove:
    """Moves down over the handle with open fingers, grips it and lifts.

    Meta-World's expert grips less firmly and loses a half-raised handle in one of six episodes.
    """

    def get_action(self, observation: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The action [4], not yet clipped, for Meta-World's observation [39]."""
        hand, handle = observation[:3], observation[4:7]
        if np.linalg.norm(hand[:2] - handle[:2]) > 0.02:
            target, fingers = handle + np.array([0.0, 0.0, 0.1]), _OPEN
        elif abs(hand[2] - handle[2]) > 0.03:
            target, fingers = handle, _OPEN
        else:
            target, fingers = handle + np.array([0.0, 0.0, 0.3]), _CLOSE
        return np.append(_GAIN * (target - hand), fingers)


class ReachWithFingers:
    """Moves the fingers to the target, where success is measured.

    Meta-World's expert moves the hand there, which leaves the fingers at the edge of success.
    """

    def get_action(self, observation: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The action [4], not yet clipped, for Meta-World's observation [39]."""
        hand, target = observation[:3], observation[-3:] + _HAND_ABOVE_FINGERS
        return np.append(_GAIN_IN_THE_AIR * (target - hand), 0.0)


OWN_EXPERTS = {"handle-pull-side-v3": LiftFromAbove, "reach-v3": ReachWithFingers}
