"""The chart, rendered, installed and taken away by the real Helm (a library), without a cluster."""

import atexit
import os
import shutil
import tempfile

# Here, before anything imports Helm: it reads the environment when it is loaded, and would leave its caches in the home folder.
_CACHES = tempfile.mkdtemp(prefix="tandem-helm-")
atexit.register(shutil.rmtree, _CACHES, ignore_errors=True)
for _variable in ("KUBECACHEDIR", "HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"):
    os.environ[_variable] = os.path.join(_CACHES, _variable.lower())
