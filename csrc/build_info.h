// What this module was built with, and whether that build runs as it should.
#pragma once

#include <pybind11/pybind11.h>

namespace mla {

// Defines build_info() and threads_used() in the module.
void register_build_info(pybind11::module_& module);

}  // namespace mla
