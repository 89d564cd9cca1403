# Compiles and links the Metal extension for macOS on arm64 against PyTorch's macOS wheels of two releases, on any
# system with a network: 190 MB of wheels and 100 MB of zig, all inside this clone.
MACOS_TORCH := 2.11.0 2.13.0
MACOS := build/macos

.PHONY: metal-link-check
metal-link-check: $(VENV)/test.stamp $(MACOS_TORCH:%=$(MACOS)/%.stamp)
	$(BIN)/pip install -q ziglang
	RIFTCO_MACOS_TORCH="$(MACOS_TORCH:%=$(MACOS)/%)" $(BIN)/python -m pytest -v -m slow tests/metal/test_metal_macos_link.py

$(MACOS)/%.stamp:
	@mkdir -p $(MACOS)
	$(BIN)/pip download -q --no-deps --only-binary=:all: --python-version 3.11 --platform macosx_11_0_arm64 \
		--platform macosx_14_0_arm64 -d $(MACOS)/wheels torch==$*
	$(BIN)/python -m zipfile -e $(MACOS)/wheels/torch-$*-*.whl $(MACOS)/$*
	@touch $@
