// The functions that Python calls.
#include <cstring>

#include "machine.h"

namespace {

int report(const std::exception& error, char* message, int size) {
  std::strncpy(message, error.what(), size - 1);
  message[size - 1] = 0;
  return 1;
}

}  // namespace

extern "C" {

emulator::Program* emulator_parse(const char* text, const char* entry, char* message, int size) {
  try {
    return new emulator::Program(emulator::parse(text, entry));
  } catch (const std::exception& error) {
    report(error, message, size);
    return nullptr;
  }
}

void emulator_free(emulator::Program* program) { delete program; }

int emulator_parameters(const emulator::Program* program) {
  return static_cast<int>(program->parameters.size());
}

int emulator_run(const emulator::Program* program, emulator::Launch* launch, char* message,
                 int size) {
  try {
    emulator::Machine(*program, *launch).run();
    return 0;
  } catch (const std::exception& error) {
    return report(error, message, size);
  }
}

}  // extern "C"
