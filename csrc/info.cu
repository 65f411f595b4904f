// Identity of the library: its ABI, how it was built, and what the driver reports.
#include "common.cuh"

#ifndef MOERT_BUILD_INFO
#define MOERT_BUILD_INFO "{}"
#endif

MOERT_API int moert_abi_version(void) { return MOERT_ABI_VERSION; }
MOERT_API const char* moert_build_info(void) { return MOERT_BUILD_INFO; }

MOERT_API const char* moert_error_string(int status) {
  switch (status) {
    case MOERT_OK: return "ok";
    case MOERT_EINVAL: return "an argument is invalid";
    case MOERT_EUNSUPPORTED: return "this size or dtype is not supported";
    case MOERT_EWORKSPACE: return "the workspace is missing or too small";
  }
  return status > 0 ? cudaGetErrorString((cudaError_t)status) : "unknown status";
}

MOERT_API int moert_probe(int* driver, int* runtime, int* devices) {
  *driver = *runtime = *devices = 0;
  cudaDriverGetVersion(driver);
  cudaRuntimeGetVersion(runtime);
  const int code = (int)cudaGetDeviceCount(devices);
  return code ? (cudaGetLastError(), code) : 0;
}
