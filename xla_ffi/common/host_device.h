// JAXUNET_HOST_DEVICE: marks functions that both the host and the device call. Empty for a plain
// C++ compiler.
#pragma once

#ifdef __CUDACC__
#define JAXUNET_HOST_DEVICE __host__ __device__
#else
#define JAXUNET_HOST_DEVICE
#endif
