"""Which module a parameter counts to: coarse, but never one module that hides the rest."""

from lerobot_craft.training.methods.constrained import module_names


def named(*sizes):
    return [(name, size) for name, size in sizes]


def test_a_large_module_is_taken_apart_and_small_ones_stay_whole():
    sizes = named(
        ("model.vlm.text.weight", 60), ("model.vlm.vision.weight", 30), ("model.expert.a.weight", 5),
        ("model.expert.b.bias", 5),
    )  # fmt: skip
    assert module_names(sizes) == ["vlm.text", "vlm.vision", "expert", "expert"]


def test_modules_of_which_none_holds_half_stay_whole():
    sizes = named(("a.x.weight", 20), ("a.y.weight", 20), ("b.weight", 30), ("c.weight", 30))
    assert module_names(sizes) == ["a", "a", "b", "c"]


def test_what_lies_directly_in_a_module_keeps_its_name():
    sizes = named(("net.scale", 90), ("net.head.weight", 10))
    assert module_names(sizes) == ["itself", "head"]


def test_many_layers_are_not_taken_apart():
    sizes = named(*((f"model.layers.{i}.weight", 10) for i in range(12)), ("model.head.weight", 5))
    assert set(module_names(sizes)) == {"layers", "head"}


def test_few_layers_are():
    sizes = named(*((f"model.layers.{i}.weight", 10) for i in range(4)), ("model.head.weight", 5))
    assert module_names(sizes) == ["layers.0", "layers.1", "layers.2", "layers.3", "head"]


def test_one_module_has_its_own_name_and_a_bare_parameter_some_name():
    assert module_names(named(("a.b.weight", 3), ("a.b.bias", 1))) == ["b", "b"]
    assert module_names(named(("weight", 3))) == ["itself"]
