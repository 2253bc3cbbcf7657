// Functions that the host and the device call.
#pragma once

#ifdef __CUDACC__
#define JAXUNET_HOST_DEVICE __host__ __device__
#else
#define JAXUNET_HOST_DEVICE
#endif
