"""What a driver without any setting hands to Ray's workers."""

HOOK = "rlhf_patches.site_hook.setup_ray_worker"
BARE = {
    "RLHF_PATCHES_AUTOLOAD": "1",
    "RLHF_PATCHES_DISABLE": "",
    "RLHF_PATCHES_ENABLE": "",
    "RLHF_PATCHES_ONLY": "",
    "RLHF_PATCHES_PLUGINS": "",
    "RLHF_PATCHES_STRICT": "",
}
