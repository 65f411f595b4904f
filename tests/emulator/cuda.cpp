// What csrc/ calls instead of CUDA's runtime: its launches run the PTX of the kernel's name.
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "machine.h"

namespace {

struct State {
  std::vector<std::string> modules;
  std::map<std::string, emulator::Program> programs;
  std::vector<emulator::Region> regions;
  std::string message;
};

State& state() {
  static State one;
  return one;
}

const emulator::Program& program_of(const void* kernel) {
  Dl_info info{};
  if (dladdr(kernel, &info) == 0 || info.dli_sname == nullptr)
    throw std::runtime_error("A kernel without a name");
  const std::string name = info.dli_sname;
  const auto found = state().programs.find(name);
  if (found != state().programs.end()) return found->second;
  for (const std::string& text : state().modules)
    if (text.find(".entry " + name + "(") != std::string::npos)
      return state().programs.emplace(name, emulator::parse(text, name)).first->second;
  throw std::runtime_error("No module has the kernel " + name);
}

}  // namespace

extern "C" {

// Adds a module, whose kernels replace those of the same names.
void emulator_load(const char* text) {
  state().modules.insert(state().modules.begin(), text);
  state().programs.clear();
}

// Allows accesses to these bytes only, until the next call; to all with a count of 0.
void emulator_allow(const emulator::Region* regions, int count) {
  state().regions.assign(regions, regions + count);
}

// Runs a kernel with pointers to its arguments, as cudaLaunchKernel; returns whether it failed.
// MOERT_EMU_SEED determines the order of everything.
int emulator_launch(const void* kernel, const uint32_t grid[3], uint32_t threads,
                    int shared_bytes, int together, const void* const* arguments) {
  const char* seed = std::getenv("MOERT_EMU_SEED");
  emulator::Launch launch{};
  std::copy_n(grid, 3, launch.grid);
  launch.block[0] = threads;
  launch.block[1] = launch.block[2] = 1;
  launch.shared_bytes = shared_bytes;
  launch.fenced = 1;
  launch.together = together;
  launch.seed = seed != nullptr ? std::strtoull(seed, nullptr, 10) : 0;
  launch.arrival = static_cast<int>(launch.seed % 3);
  launch.arguments = arguments;
  launch.regions = state().regions.data();
  launch.region_count = static_cast<int>(state().regions.size());
  try {
    emulator::Machine(program_of(kernel), launch).run();
    return 0;
  } catch (const std::exception& error) {
    state().message = error.what();
    return 1;
  }
}

// Returns why the last launch failed.
const char* emulator_message() { return state().message.c_str(); }

}  // extern "C"
